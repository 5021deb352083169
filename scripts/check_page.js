// Run by scripts/check-page: FOLDER for screenshots, then pages.
const fs = require("fs");
const path = require("path");
const { chromium } = require("playwright-core");

const [folder, ...pages] = process.argv.slice(2);
const screens = { desktop: { width: 1280, height: 900 }, phone: { width: 390, height: 844 } };
const flags = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking";

async function check(browser, file, name, colorScheme) {
  const context = await browser.newContext({ viewport: screens[name], colorScheme, bypassCSP: true });
  const page = await context.newPage();
  const problems = [];
  page.on("console", (message) => problems.push(`console: ${message.text()}`));
  page.on("pageerror", (error) => problems.push(`error: ${error.message}`));
  page.on("request", (request) => {
    if (!request.url().startsWith("file:") || request.resourceType() !== "document")
      problems.push(`asks for ${request.url().slice(0, 100)}`);
  });
  await page.goto("file://" + path.resolve(file));
  for (const open of [false, true]) {
    await page.evaluate((open) => document.querySelectorAll("details").forEach((one) => (one.open = open)), open);
    const wide = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
    if (wide > 0) problems.push(`${wide} pixels wider than the screen`);
  }
  const shot = `${path.basename(file, ".html")}-${name}-${colorScheme}.png`;
  await page.screenshot({ path: path.join(folder, shot), fullPage: true });
  await page.evaluate(fs.readFileSync(require.resolve("axe-core/axe.min.js"), "utf8"));
  const found = await page.evaluate(() => axe.run({ runOnly: ["wcag2a", "wcag2aa", "wcag21aa", "best-practice"] }));
  for (const rule of found.violations)
    problems.push(`axe ${rule.id}: ${rule.help}: ${rule.nodes.slice(0, 3).map((n) => n.html.slice(0, 150)).join(" | ")}`);
  await context.close();
  console.log(`${problems.length ? "FAIL" : "ok  "} ${shot}`);
  for (const problem of problems) console.log(`       ${problem}`);
  return problems.length;
}

(async () => {
  const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args: flags.split(" ") });
  let problems = 0;
  for (const file of pages)
    for (const name of Object.keys(screens))
      for (const scheme of ["light", "dark"]) problems += await check(browser, file, name, scheme);
  await browser.close();
  process.exit(problems ? 1 : 0);
})();
