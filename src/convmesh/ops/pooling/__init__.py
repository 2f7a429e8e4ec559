"""Max, average and adaptive pooling, and max unpooling."""
