"""Steps that are written over the old state: found for a chain by its links, staged first, then committed."""
