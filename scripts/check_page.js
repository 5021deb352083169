// Run by scripts/check-page: a folder for pictures, all | quick, then pages.
const fs = require("fs");
const path = require("path");
const { chromium } = require("playwright-core");

const [folder, mode, ...pages] = process.argv.slice(2);
const screens = { desktop: { width: 1280, height: 900 }, phone: { width: 390, height: 844 } };
// The first two show every rule a phone and a desktop, a light and a dark page; quick leaves it at them.
const views = [["phone", "light"], ["desktop", "dark"], ["phone", "dark"], ["desktop", "light"]];
const browsers = ["/usr/bin/chromium-headless-shell", "/usr/bin/chromium"];
const flags = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking";
const axe = fs.readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const rules = ["wcag2a", "wcag2aa", "wcag21aa", "best-practice"];

async function check(browser, file) {
  const context = await browser.newContext({ bypassCSP: true });
  const page = await context.newPage();
  let problems = [];
  page.on("console", (message) => problems.push(`console: ${message.text()}`));
  page.on("pageerror", (error) => problems.push(`error: ${error.message}`));
  page.on("request", (request) => {
    if (!request.url().startsWith("file:") || request.resourceType() !== "document")
      problems.push(`asks for ${request.url().slice(0, 100)}`);
  });
  await page.goto("file://" + path.resolve(file));
  await page.evaluate(axe);
  let count = 0;
  for (const [number, [screen, colorScheme]] of views.entries()) {
    const is_whole = mode === "all" || number < 2;
    await page.setViewportSize(screens[screen]);
    await page.emulateMedia({ colorScheme });
    for (const open of [false, true]) {
      await page.evaluate((open) => document.querySelectorAll("details").forEach((one) => (one.open = open)), open);
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
      if (wide > 0) problems.push(`${wide} pixels wider than the screen`);
    }
    const shot = `${path.basename(file, ".html")}-${screen}-${colorScheme}.png`;
    if (mode === "all") await page.screenshot({ path: path.join(folder, shot), fullPage: true });
    const found = is_whole ? await page.evaluate((rules) => axe.run({ runOnly: rules }), rules) : { violations: [] };
    for (const rule of found.violations)
      problems.push(`axe ${rule.id}: ${rule.help}: ${rule.nodes.slice(0, 3).map((n) => n.html.slice(0, 150)).join(" | ")}`);
    console.log(`${problems.length ? "FAIL" : "ok  "} ${shot}`);
    for (const problem of problems) console.log(`       ${problem}`);
    count += problems.length;
    problems = [];
  }
  await context.close();
  return count;
}

(async () => {
  const executablePath = browsers.find((one) => fs.existsSync(one));
  const browser = await chromium.launch({ executablePath, args: flags.split(" ") });
  let problems = 0;
  for (const file of pages) problems += await check(browser, file);
  await browser.close();
  process.exit(problems ? 1 : 0);
})();
