"""OpenAI's Responses API: conversations as items, which a gateway keeps for a while."""
