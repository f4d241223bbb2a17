"""Value types of both sides: requests, chats, formats, units, errors."""
