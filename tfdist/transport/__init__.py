"""Authenticated messages between the processes of a cluster.

`authenticated_messages`: length-prefixed JSON messages with a MAC. `handshake`: proves a shared token. `connection`,
`listener` and `dial_with_retry`: non-blocking, for `tfdist run --nodes`. `channel`: blocking, for `tfdist doctor`.
"""
