"""What a step learns from: samples as they are generated, and the flat batch that carries them to the losses."""
