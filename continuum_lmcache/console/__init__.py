"""The command `continuum-lmcache`: reads files and queries servers; the core judges what they contain."""
