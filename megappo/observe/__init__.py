"""What a run shows and leaves: metrics, trackers, the console, the run folder. A leaf: nothing here knows a model or
a rank."""
