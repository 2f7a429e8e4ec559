"""`make demo`: a small U-Net learns to denoise a real picture, on one process and on meshes of local ranks.

The same seed everywhere, so the losses must lie on each other; a page shows that, and what it took.
"""
