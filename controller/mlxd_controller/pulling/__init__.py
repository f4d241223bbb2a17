"""Downloads models from a hub into its cache on this machine; needs no running controller."""
