"""One process that commits for all gateways of a machine that share a data folder.

`shared` is the gateways' side of it and `server` its own; `frames` is what goes between them.
"""
