"""Values whose extent data decide: rows chosen out of a tensor, held as all the rows with a mask of
those chosen.

`operators` has the rule of each operator; may import ir and the frontend's inference.
"""
