"""`make demo`: a small U-Net learns to denoise a real picture, on one process and on meshes of local ranks.

All use the same seed, so the losses must coincide; a page shows that, and what it cost.
"""
