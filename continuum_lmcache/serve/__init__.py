"""The only files that import ray: replicas of vLLM's server behind Ray Serve's proxy, one state for all.

    proxy       names.py: the program of a request, from its body and headers, into one header
    proxy       router.py: asks the state where the turn goes; a hash ring if the state does not answer
    an actor    state.py: owns the Fleet (continuum_lmcache.fleet), which decides
    a replica   replica.py: vLLM's engine and vLLM's own app; reports to the state each half second
    a node      lmcache_server.py: an actor with one LMCache MP server below all of the node's replicas
    app.py      build(args): the application for `serve run` and for a Serve config file

Seams, read and run on Ray 2.60.0 (docs/fleet.md has them): all alpha, so the extra `fleet` is pinned to 2.60.
"""
