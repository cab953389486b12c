"""What the implementation refuses, each with the place at fault."""


class PackingError(ValueError):
    """Sequences that cannot be packed: an empty batch or sequence, an id out of the vocabulary."""


class BoundaryError(ValueError):
    """Position ids or cu_seqlens from which the sequences cannot be told apart with certainty."""


class ShardingError(ValueError):
    """Sizes, shards or heads that cannot be shared out."""


class LabelError(ValueError):
    """Labels that do not fit the embeddings."""


class EmbeddingError(ValueError):
    """Embeddings that hold NaN."""


class BackendError(RuntimeError):
    """An attention back end that is unknown, cannot run here, or lacks what the model asks of it."""
