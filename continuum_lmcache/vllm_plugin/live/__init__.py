"""What programs do now, as an API server tells it: `continuum-lmcache top` and `report URL`."""
