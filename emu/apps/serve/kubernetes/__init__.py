"""The cluster as Kubernetes shows it: nodes, pods and deployments, for unmodified clients.

The store, the controller and the API are pure: a request and a view of the cluster go in, answers
and actions come out. `http.py` is the shell with sockets, clocks and the emulation.
"""
