"""Every bound of the system, by name. A bound that is hit raises an error that names it."""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

# --- the wire ---------------------------------------------------------------------------------
MESSAGE_BYTES_MAX = 64 * MIB  # of an answer
# Of a request. Nobody else is served while one is received, parsed or written: each is some 20 ms
# at these sizes, measured in docs/decisions/0042.
REQUEST_BYTES_MAX = 12 * MIB
SMALL_REQUEST_BYTES_MAX = 64 * KIB  # where it holds neither prompt nor texts nor ids
REQUEST_TEXT_BYTES_MAX = 16 * KIB  # of a text that is neither prompt nor format nor JSON
REQUEST_PARTS_MAX = 1 << 17  # fields, and entries of lists; a chat of the largest has 100,000
INLINE_REQUEST_BYTES_MAX = 16 * KIB  # larger ones are read on a thread
REQUEST_THREADS_MAX = 2
# A worker's request has, besides, what its controller adds.
RELAYED_REQUEST_BYTES_MAX = 16 * MIB
RELAYED_PARTS_MAX = 64
RELAYED_IDS_MAX = MIB
# What requests under way take in all, each reckoned from its bytes, parts and numbers.
REQUESTS_HELD_BYTES_MAX = GIB
REQUEST_COPIES = 6  # as received, parsed, a text of up to three, and written for a worker
REQUEST_PART_BYTES = 512  # a message and what is made of it
REQUEST_NUMBER_BYTES = 48
REQUESTS_HELD_RETRY_S = 1.0
REQUESTS_HELD_TRIM_BYTES = 32 * MIB  # after more, what is freed goes back to the system
REQUESTS_HELD_TRIM_S = 1.0
HEAP_BLOCK_BYTES_MAX = MIB  # larger blocks are mappings of their own in a controller
HEAP_LOOK_S = 10.0  # whether what is freed is to go back to the system
HEAP_WORK_S = 0.5  # of a processor; what less leaves behind is not looked for
INQUIRY_BYTES_MAX = 8 * KIB  # a request for health or status: a name, an interval
INQUIRY_PARTS_MAX = 16
INQUIRIES_HELD_BYTES_MAX = 64 * MIB  # INQUIRIES_MAX of the largest
# A status travels as headers, of which many clients take 8 KiB in all and drop the call above. The
# message counts up to three times (percent-encoded), its copy in the details 4/3 (base64).
STATUS_TEXT_BYTES_MAX = 512
STATUS_VIOLATIONS_BYTES_MAX = 1536
REQUEST_ID_CHARS_MAX = 128
MODEL_NAME_CHARS_MAX = 512
MACHINE_NAME_CHARS_MAX = 253  # as many as a host's name may have
PROMPT_CHARS_MAX = 8 * MIB
PROMPT_BYTES_MAX = 16 * MIB  # of the same in UTF-8, and of what ids are turned into
STOP_STRINGS_MAX = 16
STOP_STRING_CHARS_MAX = 256
STOP_TOKEN_IDS_MAX = 256
LOGIT_BIAS_MAX = 1024
TOP_LOGPROBS_MAX = 20
PROMPT_LOGPROBS_MAX = 1 << 16  # of a prompt's tokens and of the best beside each: 2 MB of a message
CHOICES_MAX = 16  # of one prompt, each a stream with the worker
CHOICE_ID_CHARS = len(f".{CHOICES_MAX - 1}")  # what a choice's id has behind the request's
CHOICES_BYTES_MAX = 64 * MIB  # of a request as sent, times its choices: each has a copy
FORMAT_CHARS_MAX = MIB  # of a schema, expression or grammar, or of all choices together
FORMAT_CHOICES_MAX = 4096
EMBED_TEXTS_MAX = 256
SCORE_TEXTS_MAX = 256
SCORE_CONTINUATIONS_MAX = 64  # of each text
EMBED_STREAMS_MAX = 2  # texts of one request that are evaluated at once, beside others' streams
UNIX_TIME_MAX_S = 250_000_000_000  # in the year 9892, which every calendar still has
CHAT_MESSAGES_MAX = 8192  # and as many calls in them
CHAT_TOOLS_MAX = 1024
CHAT_JSON_CHARS_MAX = MIB  # of tools, arguments and variables together
CHAT_JSON_TEXT_CHARS_MAX = MIB // 2  # of each of them: one text is read in one step
CHAT_PROBLEM_CHARS_MAX = 300  # of what a template or a parser says
IMAGES_MAX = 16  # of a request
IMAGE_BYTES_MAX = 8 * MIB  # of an image's file
IMAGES_BYTES_MAX = 10 * MIB  # of all of a request's: below REQUEST_BYTES_MAX
IMAGE_PIXELS_MAX = 32 * MIB  # as its header says them: some 100 MB once they are decoded
IMAGE_SIDE_MAX = 16 * KIB  # in pixels
SPECULATION_DEPTH_MAX = 16
SPECULATION_DEPTH_DEFAULT = 7  # where a request leaves it to the server
PAGE_SIZE_DEFAULT = 100
PAGE_SIZE_MAX = 1000
DURATION_MAX_S = 1000 * 365 * 86_400.0  # what begins now ends at a date that the wire can carry
WATCH_INTERVAL_DEFAULT_S = 1.0
WATCH_INTERVAL_MIN_S = 0.1
TOKENIZE_IDS_MAX = 1 << 21

STREAMS_PER_CONNECTION_MAX = 128  # of a client; what it begins beyond them waits there
CALLS_MAX = 4096  # that a controller works on: four connections' fill, about 100 MiB
INQUIRIES_MAX = 1024  # calls that ask for health and status, watches too, beside those
CALLS_RETRY_MIN_S = 1.0
CALLS_RETRY_MAX_S = 60.0
CALLS_RETRY_PER_S = 250.0  # how many are told to retry in each second of that span
PENDING_CALLS_MAX = 32_768  # arrived and not taken yet: 32 connections' fill
PENDING_CALL_MAX_S = 3600  # the wait to be taken; a call with a deadline ends by that
KEEPALIVE_TIME_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000
KEEPALIVE_PING_INTERVAL_MIN_MS = 10_000
RECONNECT_BACKOFF_MIN_MS = 100
RECONNECT_BACKOFF_MAX_MS = 500
CONNECT_TIMEOUT_MS = 10_000
HANDSHAKE_TIMEOUT_MS = 10_000

# --- who may call -----------------------------------------------------------------------------
TOKEN_CHARS_MIN = 16
TOKEN_CHARS_MAX = 1024
CREDENTIAL_FILE_BYTES_MAX = 4 * MIB
REFUSAL_LOG_INTERVAL_S = 10.0
KEYS_MAX = 1_000  # of a file; each has its own labels in the metrics
KEY_NAME_CHARS_MAX = 64
KEY_MODELS_MAX = 100
KEY_LIMIT_MAX = 1_000_000_000
KEYS_LOOK_S = 1.0  # how old the keys of a file that has changed may be
METRICS_CONNECTIONS_MAX = 16
METRICS_TIMEOUT_S = 10.0

# --- the client -------------------------------------------------------------------------------
CLIENT_TIMEOUT_S = 30.0
HEALTH_TIMEOUT_S = 5.0
HISTORY_ENTRIES_MAX = 1000  # of what was typed in chats; the oldest go first
HISTORY_BYTES_MAX = MIB
HISTORY_ENTRY_CHARS_MAX = 32 * KIB  # a longer message is not in the history
SAVED_CHAT_BYTES_MAX = 16 * MIB
TOOLS_FILE_BYTES_MAX = MIB
TOOL_COMMAND_S = 60.0  # for a tool's command that the user has allowed
TOOL_RESULT_BYTES_MAX = 256 * KIB  # of its output
TOOL_ROUNDS_MAX = 16  # of calls and results for one message
MODEL_CARD_BYTES_READ = 16 * KIB  # of a model's README or licence, by `mlxd show`
COMPLETION_S = 0.5  # for a server to name its models, while a shell waits
DETACHED_START_S = 120.0  # for a server in the background to serve, its preparations included
SERVICE_COMMAND_S = 60.0  # for systemctl and launchctl; a server that stops is waited for
CONFIGURATION_BYTES_MAX = MIB  # of a configuration file
GATEWAY_LISTENS = "mlxd gateway listens on "  # its one line on stdout; the URL follows
RECONNECT_WINDOW_S = 60.0  # so long a stream that reconnects goes without a token
RECONNECT_PAUSE_MIN_S = 0.1  # after a call that was lost; each further one is twice as long
RECONNECT_PAUSE_MAX_S = 5.0

# --- the doctor -------------------------------------------------------------------------------
DOCTOR_MEMORY_BYTES_MIN = 512 * MIB  # for models: the smallest that people serve, and its worker
DOCTOR_DISK_BYTES_MIN = 256 * MIB
DOCTOR_ANSWER_S = 3.0  # what listens where a server should gets to say that it is one
DOCTOR_SILENT_MAX_S = 600.0  # of the engine's proof, in which each step says that it begins
DOCTOR_TOKENIZERS_MAX = 64  # of models on this machine, which are read

# --- the gateway ------------------------------------------------------------------------------
DEFAULT_HTTP_ADDRESS = "127.0.0.1:8556"
HTTP_BODY_BYTES_MAX = 16 * MIB  # of a request; as JSON it is larger than what goes to a controller
HTTP_BODY_HERE_BYTES_MAX = MIB  # what a larger one asks, images in base64, is read on a thread
HTTP_HEAD_BYTES_MAX = 64 * KIB
HTTP_HEAD_S = 30.0  # for a head, from a connection's or the head's own beginning
HTTP_BODY_S = 60.0  # from a request's head to the end of its body
HTTP_KEEP_ALIVE_S = 75.0  # between two requests of a connection
HTTP_REQUESTS_MAX = 2048  # under way, of all clients
HTTP_RESPONSES_MAX = 4096  # that are kept, of all clients; what was used longest ago goes first
HTTP_RESPONSES_BYTES_MAX = 256 * MIB  # of those together
HTTP_RESPONSE_AGE_S = 24 * 3600.0  # that one is kept without being used
HTTP_ITEMS_MAX = 32_768  # of a response's input, with those of the responses before it
HTTP_RETRY_S = 1.0
KEY_KNOWN_S = 10.0  # so long a key that a controller knew is let by before the body is read
KEYS_KNOWN_MAX = 1024
HTTP_WRITE_S = 60.0  # a client that takes nothing of its answer for so long is cut off
HTTP_FIRST_S = 1.0  # so long a stream's status waits for its first token; then it begins without
PAGE_STREAMS_MAX = 128  # watches, logs and loads that pages follow at once
PAGE_STREAMS_A_KEY_MAX = 32  # of these with one key, so that others' pages find a place
PAGE_NAME_CHARS_MAX = 4096  # a model, which may be a folder's path
PAGE_INTERVAL_MIN_S = 0.25  # between two looks of a page at the status
PAGE_INTERVAL_MAX_S = 60.0
HTTP_PING_S = 5.0  # a stream that says nothing for so long says that it is alive
IMAGE_FETCHES_MAX = 32  # requests whose images are fetched at once
IMAGE_FETCH_S = 10.0  # one image, redirects and all
IMAGES_FETCH_S = 30.0  # all of a request's
IMAGE_REDIRECTS_MAX = 3
IMAGE_URL_CHARS_MAX = 2048
IMAGE_ADDRESSES_MAX = 4  # of a host that are dialled, one after another; all are judged
COMPLETION_PROMPTS_MAX = 256  # of one request over HTTP
RERANK_DOCUMENTS_MAX = EMBED_TEXTS_MAX - 1  # of one request: the query may be a text beside them
HTTP_START_S = 30.0  # what a gateway gets to begin to listen
HTTP_RESTART_S = 1.0  # before a gateway that has ended by itself is started again

# --- the door for a router --------------------------------------------------------------------
DEFAULT_ROUTER_ADDRESS = "127.0.0.1:8600"  # of the first model; each further one has the next port
ROUTER_MODELS_MAX = 64  # that have a port
ROUTER_LOOK_S = 5.0  # between two looks at which models there are
ROUTER_RECORD_S = 1.0  # between two records of a model's load
ROUTER_TOKENIZER_BYTES_MAX = 200 * MIB  # of a tokenizer's files in an archive: what SMG takes
ROUTER_TOKENIZER_CHUNK_BYTES = MIB
ROUTER_TOKENIZERS_MAX = 4  # that are sent at once

# --- the worker -------------------------------------------------------------------------------
ROWS_MAX_DEFAULT = 4
ROWS_MAX_LIMIT = 256
WAITING_STREAMS_MAX = 512
WAITING_STREAMS_LIMIT = 65_536
ENGINE_MAILBOX_MAX = 4096
PREFILL_CHUNK_TOKENS = 512
PREFILL_PASS_TOKENS = 2048
TARGET_INTER_TOKEN_S = 0.1  # what prefill leaves between two tokens of a row that decodes
EVENTS_PER_MESSAGE_MAX = 64
STATUS_WAIT_S = 0.02  # for new figures; then the last ones are told, with their age
STATUS_RECENT_S = 0.25  # figures of this age are reported without asking again
IDLE_REST_S = 120.0  # after this long without a stream, memory kept for later streams is released
CONSTRAINT_COMPILES_MAX = 2  # response formats compiled at once
CONSTRAINT_COMPILES_WAITING_MAX = 64
CONSTRAINT_COMPILE_S = 10.0
CONSTRAINT_WAIT_S = 20.0  # for a turn and the compilation
CONSTRAINT_TRIAL_BYTES_MAX = GIB  # of address space
CONSTRAINTS_KEPT_MAX = 64
CONSTRAINTS_KEPT_CHARS_MAX = 4 * MIB  # of the formats' own texts
CONSTRAINT_THREADS_MAX = 8
CONSTRAINT_MASK_S = 10.0  # one mask, by the clock
CONSTRAINT_STREAM_S = 60.0  # all masks of a stream, of a processor's time
CONSTRAINT_QUICK_MASK_S = 0.002  # of late: what a row's masks take that others wait for
CONSTRAINT_MASK_WAIT_S = 0.01  # how long a step waits for masks before it goes on without them
CONSTRAINT_STUCK_MAX = 8  # threads that are in the middle of masks that nobody waited for
CHAT_RENDERS_MAX = 2  # conversations rendered at once
CHAT_RENDERS_WAITING_MAX = 256
CHAT_RENDER_S = 5.0
CHAT_RENDER_BYTES_MAX = GIB  # of address space
# Images become pixels, of the size that the model sees, in children.
IMAGE_READS_MAX = 2  # requests whose images are read at once
IMAGE_READS_WAITING_MAX = 256
IMAGE_READ_S = 10.0  # one image
IMAGES_READ_S = 30.0  # all of a request's
IMAGE_CHILD_IDLE_S = 60.0  # then it ends
IMAGE_READ_BYTES_MAX = GIB  # of address space
IMAGE_PIXELS_HELD_BYTES_MAX = 512 * MIB  # of streams that run or wait
IMAGE_HELD_RETRY_S = 1.0
IMAGE_TOKENS_MAX = 16_384  # of one image in a prompt, as a model's config may have it
IMAGE_PLACES_MAX = 4096  # of one image whose size varies: a larger one is made smaller
IMAGE_WHOLE_TOKENS_MAX = PREFILL_CHUNK_TOKENS  # of one whose places see each other: a pass has all
IMAGE_PLACES_ADAPTED_MAX = 1024  # likewise, where mlx-vlm's tower sees all patches at once
IMAGES_TOGETHER_MAX = 4  # of one size, that a model sees in one pass
IMAGE_FEATURES_KEPT_MAX = 16  # images whose features are kept for later chunks and prompts
# Text becomes tokens, and tokens text: short ones on threads of the worker, long ones in a child.
TOKENIZE_SHORT_CHARS_MAX = 64 * KIB  # some 50 ms of one core, and 10 to 40 MiB
TOKENIZE_SHORT_IDS_MAX = 16 * KIB
TOKENIZE_HERE_BYTES_MAX = MIB  # of a long text that is read on a thread all the same, and
TOKENIZE_HERE_MEMORY_BYTES_MAX = 512 * TOKENIZE_HERE_BYTES_MAX  # for it: up to 428 were measured
TOKENIZE_HERE_GROWTH_MAX = 9  # of a text before the model sees it: its normal form, its bytes
TOKENIZE_HERE_PIECE_CHARS_MAX = 512  # of one token's spelling
TOKENIZE_SHORTS_MAX = 2  # at once, long ones that are read on a thread among them, of which
TOKENIZE_HERE_MAX = 1  # at once
TOKENIZE_LONGS_MAX = 1  # at once: this bounds characters at once to one text's, and memory to
TOKENIZE_CHILD_BYTES_MAX = 3 * GIB  # of address space; the library takes up to 144 for each byte
TOKENIZE_WAITING_MAX = 256  # texts, short and long counted apart
TOKENIZE_WAITING_BYTES_MAX = 64 * MIB  # of what they hold meanwhile
TOKENIZE_LEAST_S = 10.0  # for any text, and
TOKENIZE_MOST_S = 300.0  # for one of PROMPT_BYTES_MAX, in proportion: a child has low priority
TOKENIZE_CHILD_IDLE_S = 60.0  # then it ends, and its memory with it
TOKENIZE_CHILD_NICE = 5  # while it reads the tokenizer, and as much again while it reads texts:
# a tenth of a core where streams want them all
TOKENIZER_TRIAL_S = 30.0  # to read tokenizer.json, and some texts with it, in a child
CONTEXT_LENGTH_MIN = 8
WORKER_STOP_GRACE_S = 3.0  # below WORKER_INTERRUPT_GRACE_S, after which the controller kills
PARENT_POLL_S = 1.0
CONTEXT_LENGTH_LIMIT = 1 << 24
PREFIX_MEMORY_FRACTION = 0.05  # of a device's memory, for snapshots of former prompts
PREFIX_CACHE_BYTES_LIMIT = 1 << 50
PREFIX_DISK_BYTES_DEFAULT = 16 * GIB  # of one model as it is loaded, where a folder is named
PREFIX_FOLDERS_SHOWN = 256  # of what is on disk, in a status: the largest
# To write blocks before a model goes; after WORKER_STOP_GRACE_S, within WORKER_INTERRUPT_GRACE_S.
PREFIX_SAVE_S = 1.0

# --- model files ------------------------------------------------------------------------------
CONFIG_FILE_BYTES_MAX = 16 * MIB
TOKENIZER_FILE_BYTES_MAX = 256 * MIB
TOKENIZER_GROWTH_MAX = 256  # of a text by a tokenizer's normaliser, pre-tokeniser or decoder
TOKENIZER_GROWTH_SHORT_MAX = 64  # beyond, a text is read in a child however short
TOKENIZER_STEPS_MAX = 64  # of one of these three
TOKENIZER_PIECE_CHARS_MAX = 64 * KIB  # of one token's spelling
SAFETENSORS_HEADER_BYTES_MAX = 100 * MIB
SHARDS_MAX = 4096
JSON_MEMBERS_MAX = 1 << 18  # of one object, in a header or index that is read piece by piece
FOLDER_ENTRIES_MAX = 16_384  # of a model's folder, of a store's
ALIASES_MAX = 1024
MANIFEST_BYTES_MAX = 16 * MIB
MANIFEST_LAYERS_MAX = 65_536
CHAT_TEMPLATE_CHARS_MAX = MIB

# --- pulling ----------------------------------------------------------------------------------
PULLS_MAX = 8  # downloads of a controller at once, those that wait for another one included
PULLS_A_CALLER_MAX = 4  # of those, that calls with one key may have begun
PULL_CALLS_MAX = 256  # that follow them
PULL_RESERVE_BYTES = 1 * GIB  # of the disk, which no download or copy takes: others write there
PULL_STEPS_KEPT_MAX = 1024  # for a call that does not read them; the oldest go first
PULL_PATTERNS_MAX = 64  # of further files
PULL_PATTERN_CHARS_MAX = 256
PULL_REPORT_BYTES = 4 * MIB  # of a file, between two reports on it
PULL_UNASKED_MAX_S = 20.0  # a download on a node that nobody asks about for so long ends
PULL_NICE = 10  # a download's process: whoever computes goes first

# --- the controller ---------------------------------------------------------------------------
DEFAULT_ADDRESS = "127.0.0.1:8555"
OPEN_FILES_MAX = 65_536  # what a controller requests from the system, if it allows as many
LOAD_STALL_TIMEOUT_S = 300.0
LOAD_TOTAL_TIMEOUT_S = 3600.0
UNLOAD_GRACE_DEFAULT_S = 30.0
WORKER_INTERRUPT_GRACE_S = 5.0
WORKER_SILENT_MAX_S = 20.0  # a ready worker that has answered nothing for so long is ended
ORPHAN_GRACE_S = 10.0
RANKS_MAX = 8  # devices over which one model is divided
RANKS_SERVED = (1, 2, 4, 8)  # what a load may ask for
RANK_GROUPS_MAX = 70  # groups of one machine's devices that are weighed: any 4 of 8
RANK_FRAME_BYTES_MAX = 64 << 20  # the longest message between the ranks of a model
RANK_KILLED_CODE = 72  # what a worker ends with whose follower got SIGKILL
RANK_BEAT_S = 1.0
RANK_SILENT_S = 8.0  # a rank that has not beaten for so long ends its group
RANK_STEP_S = 10.0  # on GPUs: a step of a group that takes longer ends the group
RANK_STEP_CPU_S = 60.0  # on CPUs, where a step may be slow without being stuck
RANK_LOAD_STEP_S = LOAD_STALL_TIMEOUT_S  # a load of a group that makes no progress for so long
RANK_CHECK_STEPS = 100  # ranks compare their states after so many steps
RANK_JOIN_S = 120.0  # what the ranks of a group have to start, and then to find each other
SHUTDOWN_GRACE_S = 10.0
TRACES_FLUSH_S = 2.0  # what spans that are not sent yet get at the end of a process
TRACES_LOG_INTERVAL_S = 60.0  # between two lines on a collector that does not answer
WATCHERS_MAX = 1024  # more than LOAD_WAITERS_MAX: whoever waits for a load watches it
STATUS_WATCHERS_MAX = 64  # each reads the process table at its interval
PATH_CHARS_MAX = 4096
LOGGED_CHARS_MAX = 65_536
LAST_LINES_MAX = 50
LINE_CHARS_MAX = 4096
LINES_KEPT_MAX = 2000  # of each worker's output, for who asks for its log
LINES_KEPT_BYTES_MAX = 512 * KIB
LOG_MESSAGE_BYTES_MAX = 64 * KIB
LOG_READERS_MAX = 64
EOF_GRACE_S = 5.0
RECORD_BYTES_MAX = 64 * KIB  # of what the launcher notes of a worker
ADOPTION_TIMEOUT_S = 3.0  # for each answer of a worker that a controller finds when it starts
PURGE_GRACE_S = 3.0  # for a worker that was asked to end to do so, before it is interrupted
UNIX_PATH_BYTES_MAX = 103

# --- the fleet --------------------------------------------------------------------------------
FLEET_NODES_MAX = 256  # each is asked for a report at every interval
FLEET_REPORT_INTERVAL_S = 0.5
FLEET_LOOK_INTERVAL_S = 1.0  # between two looks at which nodes there are
FLEET_SILENT_S = 5.0  # a node that answers no report for so long is lost
FLEET_CALL_S = 20.0  # for an agent to end a worker: its grace, and a kill
FLEET_TAKE_S = 60.0  # for an agent to start, to follow a controller and to end what was there
FLEET_START_S = 120.0  # for the first node, at a controller's start
FLEET_CHUNK_BYTES = MIB  # of a model's file that is copied to a node, in one call
FLEET_FILES_MAX = 4096  # of a model that is copied
FLEET_OFFERS_MAX = 64  # models whose files a node has listed for others, the latest
FLEET_HUB_WORD_S = 20.0  # for a hub to list a model's files; then they are copied from a node
FLEET_HUB_AWAY_S = 300.0  # a node asks a hub that did not answer no earlier than so
FLEET_LISTING_S = 2.0  # between two looks at what models nodes have

# --- the scheduler: the whole table, each with its reason; measured ones in docs/decisions/0023 ---
KEEP_ALIVE_DEFAULT_S = 300.0  # as Ollama's, so that clients meet what they know
MODELS_MAX = 1024  # a decision looks at every model: 0.34 ms at this many
FOLDER_NAMES_MAX = 8  # that loads give to one folder
LOADED_NAMES_MAX = MODELS_MAX // 2  # that loads give in all: other models have room beside them
HEALTH_NAMES_MAX = 2 * MODELS_MAX  # that grpc.health.v1 knows
MODELS_KNOWN_MAX = 2 * MODELS_MAX  # those too whose files have changed since, the latest
LOAD_WAITERS_MAX = 512  # as many as Ollama's queue takes; each is a few hundred bytes
UNLOAD_WAITERS_MAX = 512  # a model
MAILBOX_MAX = 65_536  # far above what all waiters and workers can say at once
NO_ROOM_RETRY_AFTER_S = 2.0  # what a client that found no room waits: about a short stream
# A model that waits for others in use: for a third of its wait others may go before, for a third
# models in use are held for it, and a third is left for a hold that comes later for its pause.
ROOM_WAIT_MAX_S = 30.0  # to become idle, then NoRoom; no more than the bound of the replay in 0023
OVERTAKEN_MAX_S = 10.0  # from then on nobody goes before the model that waits longest
HOLD_MAX_S = 10.0  # for so long a model in use takes no new request, so that it becomes idle
HOLD_PAUSE_S = 30.0  # before the same model is held again: it serves three quarters of the time
# Who goes to make room.
EVICTION_AGE_MIN_S = 5.0  # not younger: between its load and its first request, and against churn
USES_HALF_LIFE_S = 3600.0  # a use counts half after this: longer than a chat, shorter than a day
USES_MIN = 1e-3  # counted beside a model's uses: without any it is unlikely, not impossible
VICTIMS_SEARCHED_MAX = 12  # every subset of so many is weighed: 4,096, some milliseconds
# Workers that fail.
RESTARTS_AT_ONCE = 2  # in a row without a wait: a prompt that kills has had its two workers then
RESTART_BACKOFF_S = 1.0  # the first wait; each further one is twice as long
RESTART_BACKOFF_MAX_S = 30.0  # ROOM_WAIT_MAX_S: nobody waits longer for this than for memory
STEADY_S = 60.0  # a worker that lived so long was no failure
# Memory. The soft mark is what is usable: the reserve is whole. Above the hard mark workers give
# memory back until they are below the soft one.
MEMORY_RESERVE_FRACTION = 0.10  # of a device, kept free beside what others hold
HARD_MARK_FRACTION = 0.05  # of the budget, above the soft mark: half of that reserve is gone
KEPT_HEAP_NBYTES = 32 * MIB  # a worker's heap keeps so much at its end, for the next step
WORKER_HEAPS_MAX = 2  # the main thread's, which a trim gives back whole, and the others'
OWN_MAPPING_NBYTES = 8 * MIB  # a worker's arrays from this size on go back once they are freed
BLAS_SPIN_VARIABLE = "OPENBLAS_THREAD_TIMEOUT"  # read by OpenBLAS once, as it is loaded
BLAS_SPIN_CYCLES_LOG2 = "14"  # how long its idle threads look for work: 5 us; by itself 30 ms
SHRINK_TIMEOUT_S = 10.0  # for a worker's answer: a step in flight, a copy of what is kept
SHRINK_PAUSE_S = 30.0  # before a worker that gave what it could is asked again
STATUS_POLL_S = 1.0  # between two looks at memory and at the workers' figures
