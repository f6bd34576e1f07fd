"""Documents of the story tasks; scores come from the package."""

from typing import Any

from rope_patch.harness.tasks import Documents, retrieval_documents

__all__ = ["one_fact", "three_facts", "two_facts"]


def one_fact(**options: Any) -> Documents:
    """Where is a person?"""
    return retrieval_documents("qa1", **options)


def two_facts(**options: Any) -> Documents:
    """Where is an object?"""
    return retrieval_documents("qa2", **options)


def three_facts(**options: Any) -> Documents:
    """Where was an object before?"""
    return retrieval_documents("qa3", **options)
