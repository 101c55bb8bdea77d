import memory
import pytest


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_four_ranks_share_a_gigabyte(tmp_path):
    rows = memory.table(tmp_path, 330_000)
    assert rows["images"] > 1000
    assert rows["one rank"] > rows["images"]  # it was all looked at
    assert rows["images, more"] < 0.1 * rows["images"], rows


@pytest.mark.timeout(300)
def test_two_ranks_share_a_small_set(tmp_path):
    """The same, quickly: 200 MB, of which a copy of its own would cost the second rank all; the rest is noise."""
    name = "synthetic:3x32x32:10:66000"
    one, two = (memory.measure(name, tmp_path, num_ranks)["pss"] / 1e6 for num_ranks in (1, 2))
    bare = [memory.measure("digits", tmp_path, num_ranks)["pss"] / 1e6 for num_ranks in (1, 2)]
    assert (two - one) - (bare[1] - bare[0]) < 130, (one, two, bare)
