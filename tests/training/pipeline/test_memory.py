"""Memory per device, from shapes."""

from training.config import TrainingConfig
from training.pipeline.memory import memory_of
from training.pipeline.schedules import RankSize, build


def test_two_directions_keep_the_weights_of_two_stages(toy_config: TrainingConfig) -> None:
    both = memory_of(toy_config, build("DualPipe", 2, 4), 1, RankSize())
    one = memory_of(toy_config, build("1F1B", 2, 4), 1, RankSize())
    for rank in both:
        assert rank.weights == sum(other.weights for other in one)
        assert rank.gradients == sum(other.gradients for other in one)
    assert [rank.optimizer for rank in both] == [rank.optimizer for rank in one]
    # Rank 0 of 1F1B holds two micro-batches of the first stage, rank 1 one of the last; DualPipe holds three of either.
    first, last = one[0].activations // 2, one[1].activations
    for rank in both:
        assert min(first, last) * 3 <= rank.activations <= max(first, last) * 3
        assert rank.needed == rank.weights + rank.gradients + rank.optimizer + rank.activations
