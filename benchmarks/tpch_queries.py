"""The 22 queries of TPC-H for Dask DataFrame, with the substitution values that the specification uses for validation.

Each query takes a function that reads columns of a table, and returns its answer as the specification orders it. The
columns have the order of the specification too. tpch_reference.py makes the data, and has the same queries in SQL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import dask
import dask.dataframe as dd
import pandas as pd

Query = Callable[["Tables"], pd.DataFrame]


def computable(part: pd.DataFrame) -> pd.DataFrame:
    """Return floats for decimal numbers, with which pandas is slow, and pandas' own dates.

    It is not `astype` of Dask, whose optimizer filters before the conversion, and then compares other types.
    """
    types = {column: str(dtype) for column, dtype in part.dtypes.items()}
    floats = {column: "float64" for column, dtype in types.items() if dtype.startswith("decimal")}
    dates = {column: "datetime64[s]" for column, dtype in types.items() if dtype.startswith("date")}
    return part.astype(floats | dates)


@dataclass(frozen=True)
class Tables:
    """The eight tables: Parquet files, a directory for each table."""

    directory: Path
    scale: float

    def read(self, name: str, *columns: str) -> dd.DataFrame:
        """Read these columns of a table."""
        return dd.read_parquet(self.directory / name, columns=list(columns)).map_partitions(computable)

    def nations(self, prefix: str, region: str | None = None) -> dd.DataFrame:
        """Read the nations, or those of one region; the columns begin with the prefix."""
        nation = self.read("nation", "n_nationkey", "n_name", "n_regionkey")
        if region:
            regions = self.read("region", "r_regionkey", "r_name")
            regions = regions[regions.r_name == region]
            nation = nation.merge(regions, left_on="n_regionkey", right_on="r_regionkey", how="leftsemi")
        return nation[["n_nationkey", "n_name"]].rename(
            columns={"n_nationkey": f"{prefix}nationkey", "n_name": f"{prefix}nation"}
        )


def between(dates: dd.Series, first: str, end: str) -> dd.Series:
    """Return which dates are from the first day on, and before the end."""
    return (dates >= pd.Timestamp(first)) & (dates < pd.Timestamp(end))


def revenue(lines: dd.DataFrame) -> dd.Series:
    """Return the price of each line after the discount."""
    return lines.l_extendedprice * (1 - lines.l_discount)


def ordered(answer: dd.DataFrame, columns: list[str], by: dict[str, bool], rows: int | None = None) -> pd.DataFrame:
    """Compute an answer; `by` has the columns that order it, with True for those that ascend."""
    answer = answer.compute()
    answer = answer.sort_values(list(by), ascending=list(by.values()))[columns]
    return answer.head(rows or len(answer)).reset_index(drop=True)


def single(**values: dd.Series) -> pd.DataFrame:
    """Compute an answer of one row."""
    [computed] = dask.compute(values)
    return pd.DataFrame({name: [value] for name, value in computed.items()})


def q1(tables: Tables) -> pd.DataFrame:
    """Pricing summary report."""
    columns = ["l_quantity", "l_extendedprice", "l_discount", "l_tax", "l_returnflag", "l_linestatus", "l_shipdate"]
    lines = tables.read("lineitem", *columns)
    lines = lines[lines.l_shipdate <= pd.Timestamp("1998-09-02")]
    lines = lines.assign(disc_price=revenue(lines))
    lines = lines.assign(charge=lines.disc_price * (1 + lines.l_tax))
    keys = ["l_returnflag", "l_linestatus"]
    names = {
        "sum_qty": ("l_quantity", "sum"),
        "sum_base_price": ("l_extendedprice", "sum"),
        "sum_disc_price": ("disc_price", "sum"),
        "sum_charge": ("charge", "sum"),
        "avg_qty": ("l_quantity", "mean"),
        "avg_price": ("l_extendedprice", "mean"),
        "avg_disc": ("l_discount", "mean"),
        "count_order": ("l_quantity", "count"),
    }
    return ordered(lines.groupby(keys).agg(**names).reset_index(), [*keys, *names], dict.fromkeys(keys, True))


def q2(tables: Tables) -> pd.DataFrame:
    """Minimum cost supplier."""
    part = tables.read("part", "p_partkey", "p_mfgr", "p_size", "p_type")
    part = part[(part.p_size == 15) & part.p_type.str.endswith("BRASS")][["p_partkey", "p_mfgr"]]
    supplier = tables.read(
        "supplier", "s_suppkey", "s_name", "s_address", "s_nationkey", "s_phone", "s_acctbal", "s_comment"
    )
    supplier = supplier.merge(tables.nations("s_", "EUROPE"), on="s_nationkey")
    offers = tables.read("partsupp", "ps_partkey", "ps_suppkey", "ps_supplycost")
    offers = offers.merge(part, left_on="ps_partkey", right_on="p_partkey")
    offers = offers.merge(supplier, left_on="ps_suppkey", right_on="s_suppkey")
    lowest = offers.groupby("p_partkey").ps_supplycost.min().rename("lowest").reset_index()
    offers = offers.merge(lowest, on="p_partkey")
    columns = ["s_acctbal", "s_name", "s_nation", "p_partkey", "p_mfgr", "s_address", "s_phone", "s_comment"]
    order = {"s_acctbal": False, "s_nation": True, "s_name": True, "p_partkey": True}
    return ordered(offers[offers.ps_supplycost == offers.lowest][columns], columns, order, 100)


def q3(tables: Tables) -> pd.DataFrame:
    """Shipping priority."""
    day = pd.Timestamp("1995-03-15")
    customer = tables.read("customer", "c_custkey", "c_mktsegment")
    customer = customer[customer.c_mktsegment == "BUILDING"]
    orders = tables.read("orders", "o_orderkey", "o_custkey", "o_orderdate", "o_shippriority")
    orders = orders[orders.o_orderdate < day]
    orders = orders.merge(customer, left_on="o_custkey", right_on="c_custkey", how="leftsemi")
    lines = tables.read("lineitem", "l_orderkey", "l_extendedprice", "l_discount", "l_shipdate")
    lines = lines[lines.l_shipdate > day]
    lines = lines.assign(revenue=revenue(lines)).merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    sums = lines.groupby(["l_orderkey", "o_orderdate", "o_shippriority"]).revenue.sum().reset_index()
    columns = ["l_orderkey", "revenue", "o_orderdate", "o_shippriority"]
    return ordered(sums.nlargest(10, "revenue"), columns, {"revenue": False, "o_orderdate": True})


def q4(tables: Tables) -> pd.DataFrame:
    """Order priority checking."""
    lines = tables.read("lineitem", "l_orderkey", "l_commitdate", "l_receiptdate")
    late = lines[lines.l_commitdate < lines.l_receiptdate][["l_orderkey"]]
    orders = tables.read("orders", "o_orderkey", "o_orderdate", "o_orderpriority")
    orders = orders[between(orders.o_orderdate, "1993-07-01", "1993-10-01")]
    orders = orders.merge(late, left_on="o_orderkey", right_on="l_orderkey", how="leftsemi")
    counts = orders.groupby("o_orderpriority").size().rename("order_count").reset_index()
    return ordered(counts, ["o_orderpriority", "order_count"], {"o_orderpriority": True})


def q5(tables: Tables) -> pd.DataFrame:
    """Local supplier volume."""
    orders = tables.read("orders", "o_orderkey", "o_custkey", "o_orderdate")
    orders = orders[between(orders.o_orderdate, "1994-01-01", "1995-01-01")]
    customer = tables.read("customer", "c_custkey", "c_nationkey")
    orders = orders.merge(customer, left_on="o_custkey", right_on="c_custkey")[["o_orderkey", "c_nationkey"]]
    supplier = tables.read("supplier", "s_suppkey", "s_nationkey").merge(tables.nations("s_", "ASIA"), on="s_nationkey")
    lines = tables.read("lineitem", "l_orderkey", "l_suppkey", "l_extendedprice", "l_discount")
    lines = lines.merge(supplier, left_on="l_suppkey", right_on="s_suppkey")
    lines = lines.merge(orders, left_on=["l_orderkey", "s_nationkey"], right_on=["o_orderkey", "c_nationkey"])
    sums = lines.assign(revenue=revenue(lines)).groupby("s_nation").revenue.sum().reset_index()
    return ordered(sums, ["s_nation", "revenue"], {"revenue": False})


def q6(tables: Tables) -> pd.DataFrame:
    """Forecasting revenue change."""
    lines = tables.read("lineitem", "l_quantity", "l_extendedprice", "l_discount", "l_shipdate")
    lines = lines[between(lines.l_shipdate, "1994-01-01", "1995-01-01") & (lines.l_quantity < 24)]
    lines = lines[(lines.l_discount >= 0.05) & (lines.l_discount <= 0.07)]
    return single(revenue=(lines.l_extendedprice * lines.l_discount).sum())


def q7(tables: Tables) -> pd.DataFrame:
    """Volume shipping."""
    pair = ["FRANCE", "GERMANY"]
    suppliers, customers = tables.nations("s_"), tables.nations("c_")
    supplier = tables.read("supplier", "s_suppkey", "s_nationkey")
    supplier = supplier.merge(suppliers[suppliers.s_nation.isin(pair)], on="s_nationkey")[["s_suppkey", "s_nation"]]
    customer = tables.read("customer", "c_custkey", "c_nationkey")
    customer = customer.merge(customers[customers.c_nation.isin(pair)], on="c_nationkey")[["c_custkey", "c_nation"]]
    orders = tables.read("orders", "o_orderkey", "o_custkey").merge(customer, left_on="o_custkey", right_on="c_custkey")
    lines = tables.read("lineitem", "l_orderkey", "l_suppkey", "l_extendedprice", "l_discount", "l_shipdate")
    lines = lines[between(lines.l_shipdate, "1995-01-01", "1997-01-01")]
    lines = lines.merge(supplier, left_on="l_suppkey", right_on="s_suppkey")
    lines = lines.merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    lines = lines[lines.s_nation != lines.c_nation]
    lines = lines.assign(l_year=lines.l_shipdate.dt.year, revenue=revenue(lines))
    keys = ["s_nation", "c_nation", "l_year"]
    return ordered(lines.groupby(keys).revenue.sum().reset_index(), [*keys, "revenue"], dict.fromkeys(keys, True))


def q8(tables: Tables) -> pd.DataFrame:
    """National market share."""
    part = tables.read("part", "p_partkey", "p_type")
    part = part[part.p_type == "ECONOMY ANODIZED STEEL"]
    customer = tables.read("customer", "c_custkey", "c_nationkey")
    customer = customer.merge(tables.nations("c_", "AMERICA"), on="c_nationkey", how="leftsemi")
    orders = tables.read("orders", "o_orderkey", "o_custkey", "o_orderdate")
    orders = orders[between(orders.o_orderdate, "1995-01-01", "1997-01-01")]
    orders = orders.merge(customer, left_on="o_custkey", right_on="c_custkey", how="leftsemi")
    supplier = tables.read("supplier", "s_suppkey", "s_nationkey").merge(tables.nations("s_"), on="s_nationkey")
    lines = tables.read("lineitem", "l_orderkey", "l_partkey", "l_suppkey", "l_extendedprice", "l_discount")
    lines = lines.merge(part, left_on="l_partkey", right_on="p_partkey", how="leftsemi")
    lines = lines.merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    lines = lines.merge(supplier, left_on="l_suppkey", right_on="s_suppkey")
    lines = lines.assign(o_year=lines.o_orderdate.dt.year, volume=revenue(lines))
    lines = lines.assign(brazil=lines.volume.where(lines.s_nation == "BRAZIL", 0.0))
    sums = lines.groupby("o_year")[["brazil", "volume"]].sum().reset_index()
    return ordered(sums.assign(mkt_share=sums.brazil / sums.volume), ["o_year", "mkt_share"], {"o_year": True})


def q9(tables: Tables) -> pd.DataFrame:
    """Product type profit measure."""
    part = tables.read("part", "p_partkey", "p_name")
    part = part[part.p_name.str.contains("green", regex=False)]
    supplier = tables.read("supplier", "s_suppkey", "s_nationkey").merge(tables.nations("s_"), on="s_nationkey")
    offers = tables.read("partsupp", "ps_partkey", "ps_suppkey", "ps_supplycost")
    orders = tables.read("orders", "o_orderkey", "o_orderdate")
    columns = ["l_orderkey", "l_partkey", "l_suppkey", "l_quantity", "l_extendedprice", "l_discount"]
    lines = tables.read("lineitem", *columns)
    lines = lines.merge(part, left_on="l_partkey", right_on="p_partkey", how="leftsemi")
    lines = lines.merge(supplier, left_on="l_suppkey", right_on="s_suppkey")
    lines = lines.merge(offers, left_on=["l_partkey", "l_suppkey"], right_on=["ps_partkey", "ps_suppkey"])
    lines = lines.merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    profit = revenue(lines) - lines.ps_supplycost * lines.l_quantity
    lines = lines.assign(o_year=lines.o_orderdate.dt.year, sum_profit=profit)
    sums = lines.groupby(["s_nation", "o_year"]).sum_profit.sum().reset_index()
    return ordered(sums, ["s_nation", "o_year", "sum_profit"], {"s_nation": True, "o_year": False})


def q10(tables: Tables) -> pd.DataFrame:
    """Returned item reporting."""
    orders = tables.read("orders", "o_orderkey", "o_custkey", "o_orderdate")
    orders = orders[between(orders.o_orderdate, "1993-10-01", "1994-01-01")]
    lines = tables.read("lineitem", "l_orderkey", "l_extendedprice", "l_discount", "l_returnflag")
    lines = lines[lines.l_returnflag == "R"]
    lines = lines.assign(revenue=revenue(lines)).merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    best = lines.groupby("o_custkey").revenue.sum().reset_index().nlargest(20, "revenue")
    columns = ["c_custkey", "c_name", "c_acctbal", "c_nationkey", "c_address", "c_phone", "c_comment"]
    customer = tables.read("customer", *columns).merge(best, left_on="c_custkey", right_on="o_custkey")
    customer = customer.merge(tables.nations("c_"), on="c_nationkey")
    columns = ["c_custkey", "c_name", "revenue", "c_acctbal", "c_nation", "c_address", "c_phone", "c_comment"]
    return ordered(customer, columns, {"revenue": False})


def q11(tables: Tables) -> pd.DataFrame:
    """Important stock identification."""
    nation = tables.nations("s_")
    supplier = tables.read("supplier", "s_suppkey", "s_nationkey")
    supplier = supplier.merge(nation[nation.s_nation == "GERMANY"], on="s_nationkey", how="leftsemi")
    stock = tables.read("partsupp", "ps_partkey", "ps_suppkey", "ps_availqty", "ps_supplycost")
    stock = stock.merge(supplier, left_on="ps_suppkey", right_on="s_suppkey", how="leftsemi")
    stock = stock.assign(value=stock.ps_supplycost * stock.ps_availqty)
    values = stock.groupby("ps_partkey").value.sum().reset_index()
    values = values[values.value > stock.value.sum() * (0.0001 / tables.scale)]
    return ordered(values, ["ps_partkey", "value"], {"value": False})


def q12(tables: Tables) -> pd.DataFrame:
    """Shipping modes and order priority."""
    lines = tables.read("lineitem", "l_orderkey", "l_shipmode", "l_shipdate", "l_commitdate", "l_receiptdate")
    lines = lines[lines.l_shipmode.isin(["MAIL", "SHIP"]) & between(lines.l_receiptdate, "1994-01-01", "1995-01-01")]
    lines = lines[(lines.l_commitdate < lines.l_receiptdate) & (lines.l_shipdate < lines.l_commitdate)]
    orders = tables.read("orders", "o_orderkey", "o_orderpriority")
    lines = lines.merge(orders, left_on="l_orderkey", right_on="o_orderkey")
    urgent = lines.o_orderpriority.isin(["1-URGENT", "2-HIGH"])
    lines = lines.assign(high_line_count=urgent.astype("int64"), low_line_count=(~urgent).astype("int64"))
    counts = ["high_line_count", "low_line_count"]
    sums = lines.groupby("l_shipmode")[counts].sum().reset_index()
    return ordered(sums, ["l_shipmode", *counts], {"l_shipmode": True})


def q13(tables: Tables) -> pd.DataFrame:
    """Customer distribution."""
    orders = tables.read("orders", "o_orderkey", "o_custkey", "o_comment")
    orders = orders[~orders.o_comment.str.contains("special.*requests")][["o_orderkey", "o_custkey"]]
    customer = tables.read("customer", "c_custkey")
    customer = customer.merge(orders, left_on="c_custkey", right_on="o_custkey", how="left")
    counts = customer.groupby("c_custkey").o_orderkey.count().rename("c_count").reset_index()
    distribution = counts.groupby("c_count").size().rename("custdist").reset_index()
    return ordered(distribution, ["c_count", "custdist"], {"custdist": False, "c_count": False})


def q14(tables: Tables) -> pd.DataFrame:
    """Promotion effect."""
    lines = tables.read("lineitem", "l_partkey", "l_extendedprice", "l_discount", "l_shipdate")
    lines = lines[between(lines.l_shipdate, "1995-09-01", "1995-10-01")]
    lines = lines.merge(tables.read("part", "p_partkey", "p_type"), left_on="l_partkey", right_on="p_partkey")
    lines = lines.assign(revenue=revenue(lines))
    promotion = lines[lines.p_type.str.startswith("PROMO")]
    return single(promo_revenue=100 * promotion.revenue.sum() / lines.revenue.sum())


def q15(tables: Tables) -> pd.DataFrame:
    """Top supplier."""
    lines = tables.read("lineitem", "l_suppkey", "l_extendedprice", "l_discount", "l_shipdate")
    lines = lines[between(lines.l_shipdate, "1996-01-01", "1996-04-01")]
    totals = lines.assign(total_revenue=revenue(lines)).groupby("l_suppkey").total_revenue.sum().reset_index()
    # sums of floats that are equal as decimals may differ in their last digits
    best = totals[totals.total_revenue >= totals.total_revenue.max() - 0.00005]
    supplier = tables.read("supplier", "s_suppkey", "s_name", "s_address", "s_phone")
    supplier = supplier.merge(best, left_on="s_suppkey", right_on="l_suppkey")
    columns = ["s_suppkey", "s_name", "s_address", "s_phone", "total_revenue"]
    return ordered(supplier, columns, {"s_suppkey": True})


def q16(tables: Tables) -> pd.DataFrame:
    """Parts and supplier relationship."""
    part = tables.read("part", "p_partkey", "p_brand", "p_type", "p_size")
    part = part[(part.p_brand != "Brand#45") & ~part.p_type.str.startswith("MEDIUM POLISHED")]
    part = part[part.p_size.isin([49, 14, 23, 45, 19, 3, 36, 9])]
    supplier = tables.read("supplier", "s_suppkey", "s_comment")
    supplier = supplier[~supplier.s_comment.str.contains("Customer.*Complaints")]
    offers = tables.read("partsupp", "ps_partkey", "ps_suppkey")
    offers = offers.merge(supplier, left_on="ps_suppkey", right_on="s_suppkey", how="leftsemi")
    offers = offers.merge(part, left_on="ps_partkey", right_on="p_partkey")
    keys = ["p_brand", "p_type", "p_size"]
    different = offers[[*keys, "ps_suppkey"]].drop_duplicates()
    counts = different.groupby(keys).size().rename("supplier_cnt").reset_index()
    return ordered(counts, [*keys, "supplier_cnt"], {"supplier_cnt": False} | dict.fromkeys(keys, True))


def q17(tables: Tables) -> pd.DataFrame:
    """Small-quantity-order revenue."""
    part = tables.read("part", "p_partkey", "p_brand", "p_container")
    part = part[(part.p_brand == "Brand#23") & (part.p_container == "MED BOX")]
    lines = tables.read("lineitem", "l_partkey", "l_quantity", "l_extendedprice")
    lines = lines.merge(part, left_on="l_partkey", right_on="p_partkey", how="leftsemi")
    means = lines.groupby("l_partkey").l_quantity.mean().rename("mean_quantity").reset_index()
    lines = lines.merge(means, on="l_partkey")
    small = lines[lines.l_quantity < 0.2 * lines.mean_quantity]
    answer = single(avg_yearly=small.l_extendedprice.sum() / 7.0, lines=small.l_quantity.count())
    return answer[["avg_yearly"]].where(answer[["lines"]].to_numpy() > 0)  # the sum of nothing is NULL in SQL


def q18(tables: Tables) -> pd.DataFrame:
    """Large volume customer."""
    lines = tables.read("lineitem", "l_orderkey", "l_quantity")
    sums = lines.groupby("l_orderkey").l_quantity.sum().rename("sum_quantity").reset_index()
    orders = tables.read("orders", "o_orderkey", "o_custkey", "o_orderdate", "o_totalprice")
    orders = orders.merge(sums[sums.sum_quantity > 300], left_on="o_orderkey", right_on="l_orderkey")
    orders = orders.merge(tables.read("customer", "c_custkey", "c_name"), left_on="o_custkey", right_on="c_custkey")
    columns = ["c_name", "c_custkey", "o_orderkey", "o_orderdate", "o_totalprice", "sum_quantity"]
    return ordered(orders, columns, {"o_totalprice": False, "o_orderdate": True}, 100)


def q19(tables: Tables) -> pd.DataFrame:
    """Discounted revenue."""
    columns = ["l_partkey", "l_quantity", "l_extendedprice", "l_discount", "l_shipinstruct", "l_shipmode"]
    lines = tables.read("lineitem", *columns)
    lines = lines[(lines.l_shipinstruct == "DELIVER IN PERSON") & lines.l_shipmode.isin(["AIR", "AIR REG"])]
    part = tables.read("part", "p_partkey", "p_brand", "p_size", "p_container")
    lines = lines.merge(part[part.p_size >= 1], left_on="l_partkey", right_on="p_partkey")

    def matching(brand: str, size: str, containers: list[str], quantity: int, largest: int) -> dd.Series:
        of_brand = (lines.p_brand == brand) & lines.p_container.isin([f"{size} {kind}" for kind in containers])
        return of_brand & lines.l_quantity.between(quantity, quantity + 10) & (lines.p_size <= largest)

    chosen = lines[
        matching("Brand#12", "SM", ["CASE", "BOX", "PACK", "PKG"], 1, 5)
        | matching("Brand#23", "MED", ["BAG", "BOX", "PKG", "PACK"], 10, 10)
        | matching("Brand#34", "LG", ["CASE", "BOX", "PACK", "PKG"], 20, 15)
    ]
    return single(revenue=revenue(chosen).sum())


def q20(tables: Tables) -> pd.DataFrame:
    """Potential part promotion."""
    part = tables.read("part", "p_partkey", "p_name")
    part = part[part.p_name.str.startswith("forest")]
    lines = tables.read("lineitem", "l_partkey", "l_suppkey", "l_quantity", "l_shipdate")
    lines = lines[between(lines.l_shipdate, "1994-01-01", "1995-01-01")]
    lines = lines.merge(part, left_on="l_partkey", right_on="p_partkey", how="leftsemi")
    shipped = lines.groupby(["l_partkey", "l_suppkey"]).l_quantity.sum().rename("shipped").reset_index()
    stock = tables.read("partsupp", "ps_partkey", "ps_suppkey", "ps_availqty")
    stock = stock.merge(shipped, left_on=["ps_partkey", "ps_suppkey"], right_on=["l_partkey", "l_suppkey"])
    stock = stock[stock.ps_availqty > 0.5 * stock.shipped]
    nation = tables.nations("s_")
    supplier = tables.read("supplier", "s_suppkey", "s_name", "s_address", "s_nationkey")
    supplier = supplier.merge(nation[nation.s_nation == "CANADA"], on="s_nationkey", how="leftsemi")
    supplier = supplier.merge(stock, left_on="s_suppkey", right_on="ps_suppkey", how="leftsemi")
    return ordered(supplier, ["s_name", "s_address"], {"s_name": True})


def q21(tables: Tables) -> pd.DataFrame:
    """Suppliers who kept orders waiting."""
    nation = tables.nations("s_")
    supplier = tables.read("supplier", "s_suppkey", "s_name", "s_nationkey")
    supplier = supplier.merge(nation[nation.s_nation == "SAUDI ARABIA"], on="s_nationkey", how="leftsemi")
    lines = tables.read("lineitem", "l_orderkey", "l_suppkey", "l_commitdate", "l_receiptdate")
    pairs = lines[["l_orderkey", "l_suppkey"]].drop_duplicates()
    late = lines[lines.l_receiptdate > lines.l_commitdate][["l_orderkey", "l_suppkey"]]
    suppliers = pairs.groupby("l_orderkey").size().rename("suppliers").reset_index()
    late_suppliers = late.drop_duplicates().groupby("l_orderkey").size().rename("late_suppliers").reset_index()
    orders = tables.read("orders", "o_orderkey", "o_orderstatus")
    orders = orders[orders.o_orderstatus == "F"]
    late = late.merge(supplier, left_on="l_suppkey", right_on="s_suppkey")
    late = late.merge(orders, left_on="l_orderkey", right_on="o_orderkey", how="leftsemi")
    late = late.merge(suppliers, on="l_orderkey").merge(late_suppliers, on="l_orderkey")
    late = late[(late.suppliers > 1) & (late.late_suppliers == 1)]
    counts = late.groupby("s_name").size().rename("numwait").reset_index()
    return ordered(counts, ["s_name", "numwait"], {"numwait": False, "s_name": True}, 100)


def q22(tables: Tables) -> pd.DataFrame:
    """Global sales opportunity."""
    customer = tables.read("customer", "c_custkey", "c_phone", "c_acctbal")
    customer = customer.assign(cntrycode=customer.c_phone.str.slice(0, 2))
    customer = customer[customer.cntrycode.isin(["13", "31", "23", "29", "30", "18", "17"])]
    mean = customer[customer.c_acctbal > 0].c_acctbal.mean()
    customer = customer[customer.c_acctbal > mean]
    orders = tables.read("orders", "o_custkey").drop_duplicates()
    customer = customer.merge(orders, left_on="c_custkey", right_on="o_custkey", how="left")
    customer = customer[customer.o_custkey.isna()]
    names = {"numcust": ("c_acctbal", "count"), "totacctbal": ("c_acctbal", "sum")}
    sums = customer.groupby("cntrycode").agg(**names).reset_index()
    return ordered(sums, ["cntrycode", *names], {"cntrycode": True})


QUERIES: dict[int, Query] = {number: globals()[f"q{number}"] for number in range(1, 23)}
