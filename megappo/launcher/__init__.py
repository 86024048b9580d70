"""Starting ranks on this machine, joining those of torchrun or srun, and telling how a run ended. No torch."""
