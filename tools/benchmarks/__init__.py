"""The relay in numbers: `make bench`. One section a module; `results` keeps them, `page` shows them."""
