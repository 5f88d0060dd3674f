"""Records a run: clocks, traces, metrics, samples, logs, sinks and the live display. No torch."""
