"""Authenticated messages between the processes of a cluster.

`authenticated_messages`: length-prefixed JSON messages with a MAC. `handshake`: proves a shared token.
`nonblocking_connection`, for `tfdist run --nodes`; `blocking_connection`, for `tfdist doctor`.
"""
