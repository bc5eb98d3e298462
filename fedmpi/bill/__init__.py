"""What a setting costs: bytes, trips and seconds of a party and round, from the size laws, without a run."""
