"""Documents of the needle tasks; scores come from the package."""

from typing import Any

from rope_patch.harness.tasks import Documents, exact_match, recall, retrieval_documents

__all__ = ["exact_match", "multikey", "multikey_2", "multikey_3", "multiquery", "multivalue", "recall", "single"]


def single(**options: Any) -> Documents:
    """One needle per prompt."""
    return retrieval_documents("niah", **options)


def multikey(**options: Any) -> Documents:
    """A needle at every depth, one of them asked for."""
    return retrieval_documents("niah", "multikey", **options)


def multikey_2(**options: Any) -> Documents:
    """A word with a number among as many others as there is room for."""
    return retrieval_documents("niah_multikey_2", **options)


def multikey_3(**options: Any) -> Documents:
    """A UUID that belongs to a UUID among as many others as there is room for."""
    return retrieval_documents("niah_multikey_3", **options)


def multivalue(**options: Any) -> Documents:
    """Needles of one name, all asked for."""
    return retrieval_documents("multivalue", **options)


def multiquery(**options: Any) -> Documents:
    """Needles of several names, all asked for."""
    return retrieval_documents("multiquery", **options)
