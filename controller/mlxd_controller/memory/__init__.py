"""What memory there is: the host's, each GPU's, and what the kernel has ended for want of it."""
