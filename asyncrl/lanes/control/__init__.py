"""Request and reply between services.

    Client ── numbered messages ── Caller ═══ inproc | ipc | tcp ═══ Listener ── numbered messages ── Server
    calls, streams, deadlines                                                one task per call, credit

`message_codec` makes numbered frames of messages. `wire` declares what every wire offers and has the one within a
process, `zmq_wire` the one between processes; `client` and `server` speak request and reply over either, and
`open_calls` knows the calls whose answer is awaited, with their deadlines.
"""
