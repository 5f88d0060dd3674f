"""How services exchange messages.

    Link ── numbered frames ── Caller ═══ inproc | ipc | tcp ═══ Listener ── numbered frames ── Host
    calls, streams, deadlines                                            one task a call, credit

`codec` turns a message into frames, `ends` says what every wire offers, `socket` (ZeroMQ) and `inproc` are its two
kinds, `link` and `host` speak request and reply over either.
"""
