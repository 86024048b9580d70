"""The 3D-HybridEngine: weights from the training layout to the generation layout, each byte moved at most once.

`plan.py` says what each rank receives and from whom, `execute.py` moves it. Where ranks stand is in `config/grid.py`.
"""
