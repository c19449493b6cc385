"""Values of objects that are equal to others, until the objects end."""

import gc

from tfdist.utils.weak_identity_map import WeakIdentityMap


class Equal:
    def __eq__(self, other):
        return True


def test_values_are_those_of_the_object_and_end_with_it():
    known, one, other = WeakIdentityMap(), Equal(), Equal()
    known[one] = 1
    assert (known.get(one), known.get(other), one in known, other in known) == (1, None, True, False)
    known[one] = 2
    del other
    assert known.get(one) == 2
    del one
    gc.collect()
    later = [Equal() for _ in range(100)]  # some at the same place in memory
    assert not any(each in known for each in later)
    assert not known._entries
