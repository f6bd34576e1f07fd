"""Positions that skip ahead: TRL's collator drops them, and ours gives each row its own, again after a restart."""

import pytest
import torch
from torch.utils.data import default_collate

from rope_patch.training.position_collator import PositionCollator

TARGET = 1000


def rows(count=4, size=24):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 96, (count, size), generator=generator)
    return [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]


def test_pose_skips_between_chunks_and_randpos_everywhere():
    pose = PositionCollator(default_collate, TARGET, chunks=3)(rows())["position_ids"]
    assert ((pose.diff() > 1).sum(1) <= 2).all()  # tests/modeling/test_positions.py has more
    drawn = PositionCollator(default_collate, TARGET, kind="randpos")(rows())["position_ids"]
    assert (drawn.diff() >= 1).all() and ((drawn.diff() > 1).sum(1) > 15).all()
    for positions in (pose, drawn):
        assert positions.min() >= 0 and positions.max() < TARGET
        assert positions.max() > 24, "beyond the row"


@pytest.mark.parametrize("kind", ["pose", "randpos"])
def test_positions_follow_from_the_seed_and_the_row_alone(kind):
    """A run that is resumed draws those of its remaining rows, whatever was drawn before."""
    batch = PositionCollator(default_collate, TARGET, kind=kind)(rows())["position_ids"]
    alone = PositionCollator(default_collate, TARGET, kind=kind)(rows()[2:3])["position_ids"]
    assert torch.equal(alone[0], batch[2]) and not torch.equal(batch[0], batch[1])
    other = PositionCollator(default_collate, TARGET, kind=kind, seed=1)(rows())["position_ids"]
    assert not torch.equal(other, batch)


def test_the_short_row_at_the_end_of_the_documents_has_positions_too():
    (positions,) = PositionCollator(default_collate, TARGET, chunks=3)(rows(1, 2))["position_ids"]
    assert len(positions) == 2 and positions[1] > positions[0]
    assert len(PositionCollator(default_collate, TARGET)(rows(1, 1))["position_ids"][0]) == 1


def test_what_would_train_on_wrong_positions_is_refused():
    with pytest.raises(ValueError, match="longer than the target"):
        PositionCollator(default_collate, 20)(rows())
    with pytest.raises(ValueError, match="longer than the target"):
        PositionCollator(default_collate, 20, kind="randpos")(rows())
    with pytest.raises(ValueError, match="attention mask"):
        PositionCollator(default_collate, TARGET)([{"input_ids": row["input_ids"]} for row in rows()])
