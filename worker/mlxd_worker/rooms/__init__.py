"""What waits of an event loop for few threads and children: in turns, within bounds."""
