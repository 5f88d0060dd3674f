"""Simulates whole fleets on virtual time while faults are injected. Everything random in a trial comes from its seed.

draw_trial(seed)   trial_plan.py        sizes, durations and faults
run_trial(trial)   trial_execution.py   real controller, gate, journal, links, handles and supervisor
                   fault_injection.py   injects each fault when its message is sent
                   faulty_platform.py   links, worker processes and the network between hosts, which fail
                   slow_disk.py         a disk that is slow, and loses in a power cut what was not synced
                   trial_hosts.py       machines that join, leave, die and come back
                   trial_services.py    fake services, and the truth about what they did
scripts/simulate   simulate_command.py  many trials; the smallest one that still fails in the same way
"""
