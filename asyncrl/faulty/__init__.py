"""Whole fleets on virtual time in a world that loses messages, kills workers and tears journals.

trial = draw(seed)            plan.py       sizes, durations and faults, all from the seed
endure(trial)                 world.py      real controller, gate, journal, links, hosts, handles and supervisor ...
                              wire.py       ... over a wire that delays, loses, repeats and reorders messages,
                              workers.py    ... workers that compute nothing but time,
                              launcher.py   ... processes that die without a goodbye,
                              disk.py       ... and a disk that is slow and forgets what was not synced
                              checks.py     what must hold at every event
shrink(trial)                 shrinking.py  the smallest trial that still fails
"""
