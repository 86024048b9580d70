"""Process groups, collectives, vocab-parallel maths and the runtime that lets Megatron run on this machine."""
