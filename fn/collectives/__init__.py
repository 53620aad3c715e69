"""What crosses ranks: named axes, exact and compressed collectives, the ledger. Knows no optimizer."""
