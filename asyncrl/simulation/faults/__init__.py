"""Simulates whole fleets on virtual time while faults are injected. Everything random in a trial comes from its seed.

draw_trial(seed)   trial.py             sizes, durations and faults
run_trial(trial)   controller_lives.py  real controller, gate, journal, links, handles and supervisor
                   fault_injection.py   injects each fault when its message is sent
                   fault_wire.py        a wire that delays, loses, repeats and reorders messages
                   fault_launcher.py    worker processes that die without a goodbye
                   fault_services.py    fake services that read and write rows and only spend time
                   slow_disk.py         a disk that is slow and loses unsynced bytes in a power cut
                   ground_truth.py      what was really trained, read and lost
scripts/simulate   simulate_command.py  many trials; the smallest one that still fails in the same way
"""
