"""Where models come from: folders on this machine, read by headers alone."""
