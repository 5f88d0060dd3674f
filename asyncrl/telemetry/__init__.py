"""What a run says about itself: clocks, traces, metrics, samples, logs, sinks and the live display. No torch."""
