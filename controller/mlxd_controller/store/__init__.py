"""Where models come from: folders and stores on this machine, of which only headers are read."""
