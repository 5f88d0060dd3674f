"""Request and reply between services.

    Client ── numbered messages ── Caller ═══ inproc | ipc | tcp ═══ Listener ── numbered messages ── Server
    calls, streams, deadlines                                                one task per call, credit

`message_codec` makes numbered frames of messages, `wire` declares what every wire offers, `zmq_wire` and `inproc_wire`
are its two kinds, and `client` and `server` speak request and reply over either.
"""
