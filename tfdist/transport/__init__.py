"""Authenticated messages between the processes of a cluster.

`authenticated_messages`: length-prefixed JSON messages with a MAC. `handshake`: proves a shared token. `connection`
and `listener`: non-blocking, for `tfdist run --nodes`. `channel`: blocking, for `tfdist doctor`.
"""
