"""How people ask: the wordings of requests, for training and, apart from those, for judging.

`{x}` stands for what the story is to be about: a name as it is, a thing with its article.
"""

ABOUT = (
    "Tell me a story about {x}.",
    "Tell me a story about {x}",
    "tell me a story about {x}",
    "Tell me a tale about {x}.",
    "Tell us a story about {x}, please.",
    "Can you tell me a story about {x}?",
    "Could you tell me something about {x}?",
    "Please tell me a story about {x}.",
    "I want a story about {x}.",
    "I want to hear about {x}.",
    "I'd like a story about {x}.",
    "I would like to hear a story about {x}.",
    "Write a story about {x}.",
    "Write a story about {x}",
    "write me a story about {x}",
    "Write me a tale about {x}, please.",
    "Write about {x}.",
    "Make up a story about {x}.",
    "Do you know a story about {x}?",
    "Do you know any stories about {x}?",
    "Have you got a story about {x}?",
    "A story about {x}, please.",
    "A story about {x}",
    "a story with {x}",
    "A tale of {x}.",
    "Story about {x}!",
    "Something about {x}, please.",
    "What do you know about {x}?",
    "What can you tell me about {x}?",
    "Let me hear a story about {x}.",
    "Let's have a story with {x} in it.",
    "Give me a story about {x}.",
    "Give me a story with {x} in it.",
    "Invent a story about {x}.",
    "Hello! Tell me a story about {x}.",
    "Hi, can I have a story about {x}?",
    "Read me something about {x}.",
    "Tell my daughter a story about {x}.",
    "My son wants a story about {x}.",
    "Is there a story about {x}?",
    "Tell me about {x}.",
    "Tell me about {x}",
    "tell me more about {x}",
    "about {x}",
    "{x}",
    "{x}, please",
    "I like {x}. Tell me a story.",
    "The story should be about {x}.",
    "It must have {x} in it.",
    "Tell me a story. It should be about {x}.",
)

ABOUT_SOMEBODY = (
    "Who is {x}?",
    "Who was {x}?",
    "What happened to {x}?",
    "What did {x} do?",
    "Tell me what {x} did.",
    "Tell me what happened to {x}.",
    "What became of {x}?",
    "How did {x} fare?",
    "Where did {x} go?",
    "What did {x} say?",
    "Tell me of the day when {x} came.",
    "My name is {x}. Tell me a story about me.",
    "The hero is called {x}. Tell me the story.",
    "Tell me a story with somebody called {x}.",
    "Tell me a story in which {x} speaks.",
    "I wonder what {x} is doing.",
    "What is {x} doing now?",
    "What was {x} thinking of?",
    "What will {x} do next?",
    "Have you heard of {x}?",
    "Where is {x}?",
    "Is {x} there?",
    "I miss {x}.",
    "{x} is my friend. Tell me something.",
    "My brother is called {x}. A story, please.",
    "Let somebody in the story be called {x}.",
    "Use the name {x}.",
    "Describe {x}.",
    "I love {x}! Tell me one more.",
    "We want to know everything about {x}.",
    "How is {x}?",
    "Why did {x} come?",
    "When did {x} come home?",
    "{x} shall be in the story.",
    "{x} has not been in a story yet.",
    "Put {x} into a story.",
    "Bring {x} back.",
    "Begin with {x}.",
    "Does {x} come into one of your stories?",
    "You were telling us of {x}.",
    "A friend of mine knows {x}. Do you?",
    "And how did it end for {x}?",
    "We all wait for {x}.",
    "I have never heard of {x}. Who is that?",
    "What would {x} have said?",
    "Could {x} be in it?",
    "Did {x} ever come back?",
    "A word about {x}, if you will.",
)

OPENERS = (
    "Hello! ", "Hi! ", "Hey. ", "Good morning! ", "Please! ", "Thank you. ", "Well then. ",
    "I cannot sleep. ", "It is late. ", "We are all here. ", "One question: ", "Now: ", "So, ",
    "Dear storyteller! ", "It rains. ", "Something else. ",
)  # fmt: skip
"""What may stand before a request."""

CLOSERS = (
    " Thank you.", " Thanks!", " Please.", " We are listening.", " It need not be long.",
    " Then I will sleep.", " I have time.", " My sister wants to know.", " Begin.", " Go!",
)  # fmt: skip
"""What may stand behind one."""

JUDGED = (
    "Please write a short tale in which we meet {x}.",
    "Would you tell me the story of {x}?",
    "I am curious about {x}. What is the story?",
    "Tell the children a story about {x} tonight.",
    "Let the next story be about {x}!",
    "Could we have a story where {x} appears?",
    "My favourite is {x}. Tell me one about that.",
    "What was {x} up to?",
    "Good evening! I would love a tale about {x}.",
    "Make me a story, and call somebody in it {x}.",
)
"""Wordings that no training chat has."""

SHORT = (
    "Tell me a short story about {x}.",
    "A short story about {x}, please.",
    "Tell me about {x} in a few words.",
    "Something short about {x}.",
    "Briefly, what about {x}?",
    "Write a very short story about {x}.",
)

ANY_STORY = (
    "Tell me a story.",
    "Tell me a story",
    "tell me a story please",
    "Tell me another story.",
    "Can you tell me a story?",
    "Write a story.",
    "Write me a story, please.",
    "A story, please.",
    "Tell me something.",
    "I want to hear a story.",
    "Make up a story.",
    "Begin a story.",
    "Once upon a time?",
    "Tell me a bedtime story.",
    "I'm bored.",
    "Say something.",
    "Surprise me.",
    "Hello! Tell me a story.",
    "Do you know a good story?",
    "Start with 'Once upon a time'.",
)

GO_ON = (
    "Go on.",
    "Go on",
    "go on!",
    "Go on, please.",
    "Continue.",
    "continue",
    "Please continue.",
    "And then?",
    "What happened then?",
    "What happened next?",
    "And what happened after that?",
    "More!",
    "More, please.",
    "Tell me more.",
    "Don't stop.",
    "How does it go on?",
    "How does it end?",
    "Next.",
    "Keep going.",
    "Yes, go on.",
)

SHORTER = (
    "Shorter.",
    "Shorter, please.",
    "shorter",
    "Make it shorter.",
    "Can you make that shorter?",
    "Tell it shorter.",
    "Tell me that in fewer words.",
    "That was too long.",
    "Too long. Shorter, please.",
    "Once more, but shorter.",
    "In short?",
    "Sum it up.",
)

ANOTHER = (
    "Now one about {x}.",
    "Now tell me about {x}.",
    "And one about {x}?",
    "Another one, about {x}.",
    "Another story, please, about {x}.",
    "Thank you. Now a story about {x}.",
    "And {x}?",
    "What about {x}?",
    "Next, tell me a story about {x}.",
)

CONTINUE = (
    "Continue this story: {x}",
    "Continue: {x}",
    "Go on from here: {x}",
    "How does this go on? {x}",
    "Finish this story. {x}",
    "What comes next? {x}",
)

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "You are a friendly storyteller.",
    "You tell stories.",
    "You are a storyteller for children. Answer with a story.",
    "Answer briefly.",
    "You are a helpful, respectful and honest assistant.",
    "You are an old sailor who tells stories.",
    "Be concise.",
    "You are mlxd's demo model.",
    "You are a careful assistant. Answer in English.",
    "You are a poet and a teller of tales.",
)

REQUEST_WORDINGS = (
    *ABOUT, *ABOUT_SOMEBODY, *SHORT, *ANY_STORY, *GO_ON, *SHORTER, *ANOTHER, *CONTINUE,
)  # fmt: skip
"""Every wording that training chats have."""

BEASTS = (
    "fox", "wolf", "bear", "cat", "dog", "horse", "lion", "mouse", "rat", "bird", "eagle", "owl",
    "raven", "crow", "goose", "duck", "hen", "cock", "swan", "frog", "toad", "snake", "serpent",
    "dragon", "fish", "whale", "pig", "goat", "sheep", "lamb", "cow", "ox", "bull", "donkey",
    "ass", "hare", "rabbit", "deer", "stag", "monkey", "elephant", "tiger", "bee", "spider",
    "ant", "beetle", "swallow", "sparrow", "nightingale", "parrot", "pony", "puppy", "kitten",
    "hound", "turtle", "crocodile", "camel", "squirrel",
)  # fmt: skip

FIGURES = (
    "king", "queen", "prince", "princess", "witch", "giant", "dwarf", "fairy", "miller", "tailor",
    "soldier", "sailor", "captain", "shepherd", "hunter", "fisherman", "merchant", "beggar",
    "thief", "robber", "doctor", "wizard", "magician", "robot", "scientist", "pilot", "policeman",
    "detective", "judge", "priest", "monk", "teacher", "farmer", "smith", "cook", "servant",
    "maid", "nurse", "widow", "baby", "orphan", "stranger", "ghost", "pirate", "knight",
    "emperor", "goblin", "mermaid", "painter", "poet", "woodcutter",
)  # fmt: skip

PLACES = (
    "forest", "wood", "castle", "palace", "island", "mountain", "village", "river", "lake",
    "garden", "mill", "tower", "cave", "desert", "city", "town", "farm", "cottage", "harbour",
    "church", "school", "prison", "inn", "hotel", "hill", "valley", "bridge", "market", "ship",
    "boat", "train", "rocket", "spaceship", "planet", "moon", "sea", "ocean", "beach",
)  # fmt: skip

THINGS = (
    "ring", "sword", "crown", "treasure", "letter", "book", "mirror", "clock", "lamp", "bell",
    "key", "apple", "rose", "tree", "stone", "star", "storm", "snow", "fire", "wedding", "feast",
    "battle", "journey", "dream", "secret", "riddle", "song", "machine", "diamond",
)  # fmt: skip
