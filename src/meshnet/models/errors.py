"""What can be wrong with a model: each error names the file or model, what is wrong, and the remedy."""

from __future__ import annotations


class ModelError(Exception):
    """Base of every error of this package; `str(error)` is one sentence that can be shown to a person."""


class ModelNotFound(ModelError):
    """No model of this name, or no file at this path."""


class NotGGUF(ModelError):
    """The file does not start like a GGUF that this version reads."""


class TruncatedGGUF(ModelError):
    """The file ends before its header or its tensors do."""


class BadGGUF(ModelError):
    """The header contradicts itself, is absurdly large, or uses something unknown."""


class MissingPart(ModelError):
    """A split GGUF lacks one of its parts, or a part belongs to something else."""


class LayersOutside(ModelError):
    """A layer range that the model does not have."""


class Uncuttable(ModelError):
    """This architecture (or this file) is not known to survive being cut into shards."""


class HashMismatch(ModelError):
    """Bytes arrived, and they are not the bytes that were promised."""


class FetchFailed(ModelError):
    """A download could not be completed; what was verified is kept for the next try."""


class StoreFull(ModelError):
    """The store cannot make room: everything in it is in use, or the piece is larger than the store."""
