"""What a terminal shows: lines, tables, bars of progress, and a line that is being typed."""
