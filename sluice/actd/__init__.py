"""`sluice actd`: root's small helper, which does what callers of `sluice web` ask, as them."""
