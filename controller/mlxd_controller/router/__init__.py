"""The door for a router in front: models as engines of `vllm.grpc.engine`, each at a port.

Nothing here but this file and `services` may be imported without the extra.
"""
