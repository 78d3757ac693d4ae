"""The command `continuum-lmcache`: reads files and asks servers; what they mean is the core's to say."""
