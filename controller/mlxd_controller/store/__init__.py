"""Where models come from: folders and stores on this machine, read by headers alone."""
