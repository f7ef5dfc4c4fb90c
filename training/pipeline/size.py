"""How many devices train: pipeline ranks, and what a rank is made of. No jax."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RankSize:
    """The devices of a rank: `data` teams, in each of which `experts` devices split the experts."""

    data: int = 1
    experts: int = 1

    @property
    def devices(self) -> int:
        """Devices of a rank, `Z`."""
        return self.data * self.experts


def read_mesh(text: str) -> tuple[int, RankSize]:
    """Returns the pipeline ranks, and the devices of each, of a text such as `stage=4,data=2,expert=2`.

    Raises ValueError for another axis or size.
    """
    sizes = {"stage": 1, "data": 1, "expert": 1}
    for entry in text.split(","):
        axis, _, size = entry.partition("=")
        if axis not in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"{entry!r} is no axis with a size; write stage=N, data=N, expert=N, or some of them with commas"
            )
        sizes[axis] = int(size)
    return sizes["stage"], RankSize(sizes["data"], sizes["expert"])


def rows_of(batch_size: int, num_experts: int, micro_batches: int, size: RankSize) -> int:
    """Returns the rows of a micro-batch. Raises ValueError where they, or the experts, do not divide over a rank."""
    rows, rest = divmod(batch_size, micro_batches)
    if rest:
        raise ValueError(f"{micro_batches} micro-batches do not divide the batch of {batch_size} rows")
    if rows % size.devices or num_experts % size.experts:
        raise ValueError(
            f"the {size.devices} devices of a rank must divide the {rows} rows of a micro-batch, and the "
            f"{size.experts} that split the experts must divide {num_experts}"
        )
    return rows
