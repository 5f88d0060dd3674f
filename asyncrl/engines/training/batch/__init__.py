"""The training batch: samples become rows, masks, micro-batches and padded tensors."""
