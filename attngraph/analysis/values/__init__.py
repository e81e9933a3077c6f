"""What the elements are: scalars, affine maps, polynomials, weights, equal values."""
